"""Files to start from: `rookery new` copies them, with another name in the place of `start`."""
