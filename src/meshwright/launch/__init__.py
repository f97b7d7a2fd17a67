"""Starting ranks and finding one's place: a leaf that receives callables and knows nothing of models.

`environment` reads what a launcher left, `local` starts ranks on this machine, `join` makes the process group,
`rank` prepares a process to be a rank, `status` and `report` say where a rank was and what ended it.
"""
