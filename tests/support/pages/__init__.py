"""For the tests of pages: `access`, whether everybody can use one; `device`, a client that serves one."""
