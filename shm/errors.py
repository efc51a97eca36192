"""Errors of shared-memory segments. Nothing is touched when one of them is raised."""

from __future__ import annotations


class SegmentError(Exception):
    """A segment cannot be used; the message names it and says what would help."""


class SegmentMissingError(SegmentError):
    """No segment of that name exists."""


class SegmentExistsError(SegmentError):
    """A segment of that name exists already."""


class BadHeaderError(SegmentError):
    """The control segment does not start with our magic number."""


class VersionMismatchError(SegmentError):
    """The control segment was written in another format version."""


class ShortSegmentError(SegmentError):
    """The segment is shorter than its layout."""


class ForeignOwnerError(SegmentError):
    """The segment belongs to another run, layout, or living process."""


class NoSpaceError(SegmentError):
    """/dev/shm has no room for the segment."""
