"""What watches over a run: here, steps that go bad."""
