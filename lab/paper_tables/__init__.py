"""The papers' tables: settings, runs, and the published numbers beside ours."""
