"""The HTTP server: OpenAI's interface, a page that shows the running batch, and metrics. Command: ``oarlock serve``."""
