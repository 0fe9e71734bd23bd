"""Registers the kit with pytest. Imports neither mlx nor the kit when it loads."""
