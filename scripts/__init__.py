"""Programs that a person starts, each by its path; `command_line.py` runs them where the package is installed."""
