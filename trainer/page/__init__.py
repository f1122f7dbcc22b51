"""report.html: a run on one page that needs no network, no script, and no colours to be read."""
