"""The mission, pretokenize: a test for each row of docs/mission.md, by public commands and API."""

# ---------- m01 ----------

# ---------- m02 ----------

# ---------- m03 ----------

# ---------- m04 ----------
