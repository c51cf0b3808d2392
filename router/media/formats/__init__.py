"""One reader a file format: bytes to `ImageHeader`, without decoding.

Every reader takes at most a bounded number of steps whatever the bytes say,
looks at nothing twice, and works on a prefix of the file as well: where the
bytes end after the size is known, it returns what it knows.
"""
