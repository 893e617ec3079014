/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/gate/open_child.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>

#include "daemon/base/mem.h"
#include "daemon/gate/record.h"

static int open_file(pid_t pid, const char *name, int mode)
{
	char path[40];

	snprintf(path, sizeof(path), "/proc/%d/%s", (int)pid, name);
	return open(path, (mode & O_ACCMODE) | O_CLOEXEC);
}

int open_process(pid_t pid, int mode, int fds[OPEN_FDS])
{
	int no;

	fds[OPEN_STATUS] = -1;
	fds[OPEN_MEM] = open_file(pid, "mem", mode);
	if (fds[OPEN_MEM] >= 0)
		fds[OPEN_STATUS] = open_file(pid, "status", O_RDONLY);
	no = fds[OPEN_STATUS] < 0 ? errno : 0;
	if (no)
		mem_closep(&fds[OPEN_MEM]);
	return no;
}

void open_child_serve(int socket)
{
	struct open_ask ask;

	while (record_receive(socket, &ask, sizeof(ask), NULL, 0, NULL) == sizeof(ask)) {
		int fds[OPEN_FDS];
		struct open_answer answer = {
			.error = open_process(ask.pid, ask.mode, fds)};

		(void)record_send(socket, &answer, sizeof(answer), NULL, 0, fds,
				  answer.error ? 0 : OPEN_FDS);
		mem_closep(&fds[OPEN_MEM]);
		mem_closep(&fds[OPEN_STATUS]);
	}
}
