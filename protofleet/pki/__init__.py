"""The fleet's own certificate authority, and the files of a broker that lets nobody speak for another."""
