"""The mission, keep: a test for each row of docs/mission.md, by public commands and API."""

# ---------- m28 ----------

# ---------- m29 ----------

# ---------- m30 ----------
