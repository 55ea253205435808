"""The tables and numbers of documents, by what was measured: functions from rows to text."""
