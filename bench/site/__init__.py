"""The documentation site: ``make site`` builds ``build/site`` from ``docs/`` with mkdocs-material.

:mod:`.commands` writes docs/COMMANDS.md; :mod:`.hooks` prepares the pages for mkdocs.
"""
