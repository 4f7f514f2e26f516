"""Files that `rookery new` copies, with the user's name in the place of `start`."""
