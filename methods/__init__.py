"""Built-in methods, found through entry points like anyone's."""
