/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/gate/open_child.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include "daemon/gate/record.h"

void open_child_serve(int socket)
{
	struct open_ask ask;
	char path[40];

	while (record_receive(socket, &ask, sizeof(ask), NULL, 0, NULL) == sizeof(ask)) {
		struct open_answer answer = {0};
		int fd;

		snprintf(path, sizeof(path), "/proc/%d/mem", (int)ask.pid);
		fd = open(path, (ask.mode & O_ACCMODE) | O_CLOEXEC);
		if (fd < 0)
			answer.error = errno;
		(void)record_send(socket, &answer, sizeof(answer), NULL, 0, &fd, fd >= 0);
		if (fd >= 0)
			close(fd);
	}
}
