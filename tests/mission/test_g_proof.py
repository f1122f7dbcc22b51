"""The mission, proof: a test for each row of docs/mission.md, by public commands and API."""

# ---------- m34 ----------

# ---------- m35 ----------

# ---------- m40 ----------
