"""Built-in plugins, found through entry points like anyone's."""
