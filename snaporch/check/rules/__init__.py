"""The rules of ``snaporch check``: each public function is a rule, named after its findings."""
