# SPDX-License-Identifier: Apache-2.0
# failures.awk: which cases of a test failed and why, from its log, a line each.
#
#   awk -v end="died of SIGSEGV" -f scripts/failures.awk LOG
#
# `end` says how the test ended, when that was not by itself: it is told with the case
# that was running, or with the last one of which is known how it ended. Without a
# failed case the end of the log is all there is.
#
# Known are the forms that tests of this tree have:
#   TAP       not ok N NAME, then "# REASON"
#   cmocka    [ RUN ] NAME, [ ERROR ] --- REASON, [ LINE ] --- FILE:LINE, [ FAILED ] NAME
#   scripts   FAIL NAME or FAILED: NAME, then the reason, indented; or FAIL NAME: REASON
#   Python    a traceback, then FAIL NAME
#   gpu-works the reason, indented, then an indented FAIL NAME
#   pytest    FAILED FILE::NAME - REASON
# and what sanitizers and assert() say. Other lines are not read: a log may speak of
# errors and failures that a test provokes.

function cut(text)
{
	return length(text) > 300 ? substr(text, 1, 297) "..." : text
}

function tell(name, reason)
{
	if (name != "" && reason != "")
		name = name ": "
	if ((name reason) in told)
		return
	told[name reason]
	if (++count <= 50)
		print cut(name reason)
}

# more of a reason that has several lines: the first and the last ones tell most
function more(text)
{
	sub(/^[ \t]+/, "", text)
	if (text == "")
		return
	if (lines++ < 4)
		reason = reason (reason == "" ? "" : " | ") text
	else
		tail = text
}

function begin(text)
{
	reason = tail = place = ""
	lines = 0
	more(text)
}

# cmocka's words, which may begin with where they were said: the first place counts
function located(text)
{
	if (sub(/^\[   LINE   \] --- /, "", text)) {
		form = ""
		if (place == "")
			place = substr(text, 1, index(text, ": error:") - 1)
		sub(/^.*: error: Failure!/, "", text)
	}
	more(text)
}

function whole()
{
	return reason (tail == "" ? "" : " | ... | " tail) (place == "" ? "" : " (" place ")")
}

# What is open ends: a case whose reason has had all its lines, a sanitizer's report.
function finish()
{
	if (form == "case")
		tell(name, whole())
	else if (form == "sanitizer")
		tell(where(), whole())
	form = ""
}

# the case that runs, or the last that ended
function where()
{
	return running != "" ? running : last != "" ? "after " last : ""
}

function passed_by(text)
{
	sub(/^(not )?ok +([0-9]+ +)?/, "", text)
	sub(/ \([0-9.]+ m?s\)$/, "", text)
	return text
}

{
	sub(/\r$/, "")
	if ($0 ~ /[^ \t]/)
		end_of_log[++log_lines % 10] = $0
}

# ---- what goes on with the lines before ----

form == "case" && style == "tap" && /^# / {
	more(substr($0, 3))
	next
}
form == "case" && style == "script" && /^[ \t]+[^ \t]/ && !traceback {
	more($0)
	next
}
form == "case" && style == "works" && /^    it hung/ {
	more($0)
	next
}
form == "sanitizer" && /^ *#[0-9]+ / {
	# the first frame that is of no library
	if (place == "" && match($0, / [^ (]+\.[a-z]+:[0-9]+/) && !/ \.\.\//)
		place = substr($0, RSTART + 1, RLENGTH - 1)
	next
}
form == "cmocka" && !/^\[/ {
	more($0)
	next
}
traceback && /^  File "/ {
	file = $2
	gsub(/[",]/, "", file)
	foreign = place != "" && file ~ /\/lib\/python[0-9.]*\/|^</
	if (foreign) # how the test came there tells more
		next
	sub(/.*\//, "", file)
	place = file ":" ($4 + 0)
	source = ""
	next
}
traceback && /^[ \t]/ {
	if (!ended && foreign)
		next
	if (!ended && source == "" && $0 !~ /^ *[~^]+ *$/) {
		source = $0
		sub(/^ +/, "", source)
	} else if (ended) {
		more($0)
	}
	next
}
traceback && !ended && /^[A-Za-z0-9_.]+(:|$)/ {
	at = place
	# assert without words: the line that does not hold
	begin($0 ~ /:/ ? $0 : $0 ": " source)
	place = at
	ended = 1
	if (form == "traced") { # of a case that was named before
		form = "case"
		traceback = 0
	}
	next
}
/^Traceback \(most recent call last\):$/ {
	finish()
	traceback = 1
	ended = 0
	place = ""
	next
}
traceback && ended && /^===/ { # what a process of a pytest said
	tell("", whole())
	traceback = 0
	next
}
traceback && ended && !/^(ok|FAIL|again|skip) / {
	more($0)
	next
}

# ---- what begins ----

/^not ok / {
	finish()
	name = last = passed_by($0)
	begin("")
	form = "case"
	style = "tap"
	next
}
/^ok +/ {
	finish()
	last = passed_by($0)
	traceback = 0
	next
}
/^(again|skip) / {
	finish()
	traceback = 0
	next
}
/^\[ RUN      \] / {
	finish()
	running = $4
	begin("")
	next
}
running != "" && /^ERROR: / { # fail_msg()
	more(substr($0, 8))
	next
}
running != "" && /^(Could not run test: |\[   LINE   \] --- )/ {
	sub(/^Could not run test: /, "") # of a fixture
	located($0)
	next
}
/^\[  ERROR   \] --- / {
	form = "cmocka"
	sub(/^[^-]*--- /, "")
	located($0)
	next
}
/^\[  ERROR   \] / {
	finish()
	sub(/^[^\]]*\] /, "")
	tell($0, whole())
	next
}
/^\[  FAILED  \] GROUP / { # the next line is its name
	begin(substr($0, 14))
	form = ""
	next
}
/^\[  FAILED  \] [^ ]+$/ {
	form = ""
	if (running == $4)
		tell($4, whole())
	else if (!($4 in failed)) # those that have failed are listed at the end
		tell($4, "")
	failed[$4]
	last = $4
	running = ""
	next
}
/^\[ +(OK|SKIPPED) +\] / {
	finish()
	last = $NF
	running = ""
	next
}
/^FAILED [^ ]+::|^ERROR [^ ]+(::| - |\.py$)/ {
	finish()
	sub(/^[A-Z]+ /, "")
	sub(/ - /, ": ") # a parameter in the name may hold spaces
	tell("", $0)
	next
}
/^FAIL(ED)?:? / {
	finish()
	sub(/^FAIL(ED)?:? +/, "")
	name = last = $0
	style = "script"
	if (traceback && ended) {
		tell(name, whole())
		traceback = 0
	} else if (name ~ /: Traceback \(most recent call last\):$/) {
		sub(/: Traceback .*/, "", name)
		last = name
		traceback = 1
		ended = 0
		form = "traced"
	} else {
		sub(/: .*/, "", last)
		begin("")
		form = "case"
	}
	next
}

/^    [^ ]/ {
	said = $0
}
/^  (ok|skip) / {
	said = ""
}
/^  FAIL +[^ ]+ +[0-9.]+ s/ {
	finish()
	name = last = $2
	begin(said)
	said = ""
	form = "case"
	style = "works"
	next
}

# ---- what a process says at its end ----

/^==[0-9]+==ERROR: [A-Za-z]+Sanitizer|^WARNING: ThreadSanitizer|^==[0-9]+==WARNING: [A-Za-z]+San/ {
	finish()
	sub(/^(==[0-9]+==)?(ERROR|WARNING): /, "")
	sub(/ on (unknown )?address 0x.*/, "")
	sub(/ \(pid=.*/, "")
	begin($0)
	form = "sanitizer"
	next
}
/: runtime error: / {
	finish()
	tell(where(), $0)
	next
}
/: Assertion `.*' failed\.$/ {
	finish()
	tell(where(), $0)
	next
}
form == "case" {
	finish()
}

END {
	if (traceback && ended && form != "case")
		tell(where(), whole())
	finish()
	if (end ~ /^(died|timed)/) {
		tell("", end (running != "" ? " in " running : \
			last != "" ? " after " last : ""))
	} else if (!count) {
		print end == "" ? "no case is named; the log ends so:" : end "; the log ends so:"
	}
	if (count > 50)
		print "... and " count - 50 " more"
	if (!count || (count == 1 && end ~ /^(died|timed)/ && where() == ""))
		for (i = log_lines - 9; i <= log_lines; i++)
			if (i > 0)
				print "  " cut(end_of_log[i % 10])
}
