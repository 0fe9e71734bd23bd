"""The conformance kit and tiny models for plugin authors. Nothing here is imported by the engine."""
