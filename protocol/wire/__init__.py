"""How processes of a run talk: frames between workers and daemons, clients of the daemons."""
