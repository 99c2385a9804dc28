"""The commands behind the console scripts and the Makefile, one module each."""
