"""Training tasks to copy: each file is complete, and runs with every launcher."""
