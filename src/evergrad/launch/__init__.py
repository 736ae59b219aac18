"""Starting the processes of a job on this machine, watching over them, and showing how the job goes.

`decide.py` holds the rules, `run.py` the loop that follows them, `processes.py` what runs, `jobfile.py` what others
read to find the job, `view.py` what people see.
"""
