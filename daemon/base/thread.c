/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/base/thread.h"

#include <signal.h>

#include "daemon/base/err.h"

int thread_start(const char *name, void *(*run)(void *arg), void *arg,
		 pthread_t *thread_p)
{
	sigset_t all, old;
	int no;

	sigfillset(&all);
	sigdelset(&all, SIGBUS);
	sigdelset(&all, SIGSEGV);
	sigdelset(&all, SIGILL);
	sigdelset(&all, SIGFPE);
	/* inherited, so that there is no moment without it */
	pthread_sigmask(SIG_SETMASK, &all, &old);
	no = pthread_create(thread_p, NULL, run, arg);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (no)
		return err_raise_errno(no, "starting thread %s", name);
	(void)pthread_setname_np(*thread_p, name);
	return 0;
}
