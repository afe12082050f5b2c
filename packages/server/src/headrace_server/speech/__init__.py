"""Speech to text: uploads to engine requests, their outputs to text, segments, words and subtitles."""
