"""Access control: keys of a run, names in certificates, and the rights of each name.

``addresses`` decides which addresses need protection, ``identity`` defines names in certificates,
``folders`` reads keys, ``authority`` makes them. ``credentials`` are the clients' side,
``admission`` the server's. docs/SECURITY.md is the page for users.
"""
