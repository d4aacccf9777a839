# Prints what a log of "make test" says of the tests that failed, as tests of several modes are mixed in it. A line of a mode has
# the mode before it. Of each mode, what the test that failed has said is printed, its last lines at least, and some after it.
BEGIN { before = 150; after = 25 }
{
	mode = match($0, /^(mode-[a-z]+|[a-z0-9-]+-beside): /) ? substr($0, 1, RLENGTH) : ""
	line = substr($0, length(mode) + 1)
	if (line ~ /^=== RUN +[^\/]*$/) first[mode] = count[mode] # of another test
	if (line ~ /^--- FAIL: |^panic: |^fatal error: |WARNING: DATA RACE|^FAIL\t/) {
		if (left[mode] <= 0) printf "\n"
		for (i = count[mode] - before + 1 > first[mode] ? count[mode] - before + 1 : first[mode] + 1; i <= count[mode]; i++) print kept[mode, i]
		first[mode] = count[mode]
		left[mode] = after
		print
	} else if (left[mode] > 0) {
		left[mode]--
		print
		first[mode] = count[mode]
	} else {
		kept[mode, ++count[mode]] = $0
		delete kept[mode, count[mode] - before]
	}
}
