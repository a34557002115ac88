"""The language model, behind one door: a question in, a validated answer or AdvisorError out."""
