"""What `%load_ext skyproxy` adds to Jupyter and IPython: the magic `%sky` and its tables."""
