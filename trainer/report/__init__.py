"""What a run reports: report.json, metrics, progress, trackers."""
