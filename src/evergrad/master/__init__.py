"""The master: knows the members, hands out tasks, decides commits, and ends epochs and the job."""
