"""Programs that read runs or measure the library and print one JSON object each."""
