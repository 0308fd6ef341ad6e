"""The additions of `%load_ext skyproxy` to Jupyter and IPython: the magic `%sky` and its tables."""
