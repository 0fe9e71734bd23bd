"""Built-in layouts, found through entry points like anyone's."""
