/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/base/thread.h"

#include <signal.h>

#include "daemon/base/err.h"

int thread_start(const char *name, void *(*run)(void *arg), void *arg,
		 pthread_t *thread_p)
{
	char own[16] = "";
	sigset_t all, old;
	int no;

	sigfillset(&all);
	sigdelset(&all, SIGBUS);
	sigdelset(&all, SIGSEGV);
	sigdelset(&all, SIGILL);
	sigdelset(&all, SIGFPE);
	/* inherited, so that the thread never runs without it */
	pthread_sigmask(SIG_SETMASK, &all, &old);
	/* the name, too: another's is a file, which Landlock does not let be written */
	(void)pthread_getname_np(pthread_self(), own, sizeof(own));
	(void)pthread_setname_np(pthread_self(), name);
	no = pthread_create(thread_p, NULL, run, arg);
	(void)pthread_setname_np(pthread_self(), own);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (no)
		return err_raise_errno(no, "starting thread %s", name);
	return 0;
}
