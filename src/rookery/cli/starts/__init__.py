"""Files that `rookery new` copies, with the user's name instead of `start`."""
