"""The computing processes: one worker for each device, which runs its program attempt by
attempt.
"""
