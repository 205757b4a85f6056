"""The paper's tables and figures beside ours.

Where to look:

- experiments: each page's way, from running over choosing to writing.
- plans, budgets: what there is to decide, and how each budget decides it.
- run: jobs that train, attack and certify, resumable. They write no prose.
- jobs, cluster: who does jobs. records, compact: how results are kept.
- choose: which network a cell of a table takes.
- rows: the rows of each page's CSV file, ours beside the paper's.
- pages: Markdown, CSV and PNG of these rows. They run and choose nothing.
- paper: the figures that the paper gives, and how it trained.
"""
