/* SPDX-License-Identifier: Apache-2.0 */
/* One query to a daemon with another protocol version, for state that an operator needs
 * during an upgrade. One line in each direction. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "ctl/ctl.h"
#include "daemon/base/mem.h"
#include "lib/kvd.h"

bool ctl_needs_no_session(const char *cmd)
{
	return !strcmp(cmd, "health") || !strcmp(cmd, "stats");
}

static int plain_connect(const struct ctl *ctl)
{
	struct timeval limit = {.tv_sec = ctl->timeout_ms / 1000,
				.tv_usec = ctl->timeout_ms % 1000 * 1000};
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

	if (ctl->socket)
		snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", ctl->socket);
	else if (kvd_socket_find(ctl->name, addr.sun_path, sizeof(addr.sun_path), NULL))
		errno = ENOENT;
	if (fd < 0 || !*addr.sun_path ||
	    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)) < 0 ||
	    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit)) < 0 ||
	    connect(fd, (struct sockaddr *)&addr, sizeof(addr)) < 0)
		mem_closep(&fd);
	return fd;
}

static cJSON *plain_talk(int fd, const char *cmd, const char *args)
{
	FILE *stream = fdopen(fd, "r+");
	cJSON *reply = NULL;
	char *line = NULL;
	size_t size = 0;
	ssize_t n;

	if (!stream) {
		close(fd);
		return NULL;
	}
	fprintf(stream, "{\"id\":1,\"cmd\":\"%s\"%s%s\n", cmd, args ? "," : "",
		args ? args + 1 : "}"); /* the format has the opening brace */
	if (fflush(stream) == 0 && (n = getline(&line, &size, stream)) > 0)
		reply = cJSON_ParseWithLength(line, (size_t)n);
	free(line);
	fclose(stream);
	return reply;
}

int ctl_ask_plain(struct ctl *ctl, const char *cmd, const char *args, cJSON **reply_p)
{
	int fd = plain_connect(ctl);
	cJSON *reply = fd < 0 ? NULL : plain_talk(fd, cmd, args);

	if (cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(reply, "ok"))) {
		*reply_p = reply;
		return CTL_OK;
	}
	fprintf(stderr,
		"kvd-ctl: %s: the daemon did not reply without a session either\n", cmd);
	cJSON_Delete(reply);
	return CTL_NO_DAEMON; /* the exit status is CTL_VERSION */
}
