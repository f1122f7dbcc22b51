"""The mission, feed: a test for each row of docs/mission.md, by public commands and API."""

# ---------- m05 ----------

# ---------- m06 ----------
