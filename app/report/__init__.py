"""Reports: what a run or a job did, as one HTML file that needs nothing else, and two of them compared.

| module | what it does |
|---|---|
| `subject.py` | what a report is about: a run or a job with its actions, grants and figures |
| `comparison.py` | the figures of two subjects side by side |
| `series.py` | amounts over time, from spans of time |
| `pictures.py`, `timeline.py` | the pictures, as plotly.js takes them |
| `tables.py` | the tables |
| `page.py` with `page.html.jinja`, `page.css`, `page.js` | the page |

Names, reasons and classes are text that trainers and programs wrote. Jinja escapes them in HTML, `text.py` in the pictures.
"""
