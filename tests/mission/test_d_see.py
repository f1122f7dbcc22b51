"""The mission, see: a test for each row of docs/mission.md, by public commands and API."""

# ---------- m22 ----------

# ---------- m23 ----------

# ---------- m24 ----------

# ---------- m25 ----------

# ---------- m26 ----------

# ---------- m27 ----------
