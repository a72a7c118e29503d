"""Where backends are found: names, files and Kubernetes, each a source of one small interface."""
