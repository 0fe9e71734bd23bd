"""A third party's package. Importing it imports neither the plugin nor mlx."""
