"""epcomm in other frameworks: a module or package for each, which nothing else imports."""
