"""What plugins implement, one file a seam. Nothing here runs a model."""
