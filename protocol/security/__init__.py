"""Who may talk to whom: keys of a run, names in certificates, and what each name may do.

``addresses`` says which addresses need protection, ``identity`` what certificates name, ``folders``
reads keys, ``authority`` makes them. docs/SECURITY.md is the page for users.
"""
