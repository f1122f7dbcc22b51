"""The mission, platforms: a test for each row of docs/mission.md, by public commands and API."""

# ---------- m31 ----------

# ---------- m32 ----------

# ---------- m33 ----------
