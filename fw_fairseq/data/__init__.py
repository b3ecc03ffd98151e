"""Text as the tasks read it: whole, as streams of segments, and as sliding windows."""
