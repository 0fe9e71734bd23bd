"""Built-in samplers, found through entry points like anyone's."""
